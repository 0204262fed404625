"""The one place that states the version; refuses to import anything, so that the build can read it."""

__version__ = "0.1.0"
