"""Manifests and scripts that launch training runs on clusters."""
