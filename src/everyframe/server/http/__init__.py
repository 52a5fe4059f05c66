"""The HTTP application: access, routes, event streams and the OpenAPI document."""
