"""Publishing a finished run and restoring one: everything that leaves this machine passes through here."""
