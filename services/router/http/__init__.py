"""The HTTP server: connections, authentication, admission, and the process that serves."""
