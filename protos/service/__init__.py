"""The shell of every process: settings, logs, metrics, server, channel, status, lifecycle."""
