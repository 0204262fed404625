"""Hostile strangers, files and environments: what other users and a broken machine can do to a job from outside."""
