"""fastps.bench: microbenchmarks, peers and the papers' tables. Never a test: it prints figures and judges nothing."""
