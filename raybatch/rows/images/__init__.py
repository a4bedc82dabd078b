"""Images of rows: columns, files, values, and the tokens that they take."""
