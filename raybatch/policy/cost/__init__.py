"""Cost models: rooflines of modules, fitted step costs, forecasts of steps."""
