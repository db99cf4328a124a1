"""Old Horovod names that are not part of training: small tools, environment, build check."""
