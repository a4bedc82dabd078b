"""What work costs: rooflines, measured models, forecasts of steps."""
