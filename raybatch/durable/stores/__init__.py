"""Where an output lies, a folder or a bucket: the few verbs that the commit protocol needs."""
