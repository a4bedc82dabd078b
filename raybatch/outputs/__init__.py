"""What is done with the output of a job once it lies there: look, account, tidy up."""
