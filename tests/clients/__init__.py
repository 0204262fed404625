"""Programs as users of other frameworks write them, with the one to three lines that fastps changes; run by `make test-all`."""
