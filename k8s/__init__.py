"""Deployment: manifests, and the code that writes rules and dashboards. Part of no distribution."""
