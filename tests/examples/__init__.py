"""The programs of examples/, each at a small size."""
