"""Modules that need an extra: those of another framework are imported by tests only where it is installed."""

import importlib.util

_NEEDS = {"fastps.integrations.lightning": "lightning"}


def is_importable(module: str) -> bool:
    """Whether what a module of fastps needs is installed."""
    needed = [package for name, package in _NEEDS.items() if module == name or module.startswith(f"{name}.")]
    return all(importlib.util.find_spec(package) is not None for package in needed)
