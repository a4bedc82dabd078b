"""What a plan saves and costs, told before the run; and plan and actual side by side after it."""
