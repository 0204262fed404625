"""Programs as users of other frameworks write them, plus the one to three lines for fastps; `make test-all` runs them."""
