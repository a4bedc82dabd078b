"""Ray Data operators: columns in, columns out."""
