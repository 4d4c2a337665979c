"""takes the HTTP API of `api`, gives programs and the CLI typed calls; imports no server code."""
