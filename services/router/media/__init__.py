"""Admit a request's images: find, fetch, check and decode them before vLLM's front end renders the request.

- `parts`: finds the images of a request of any API, and refuses what is not served
- `files`: reads `data:` URLs, and fetches http(s) URLs from the domains that the operator allows
- `decoder`: the program that decodes files, in processes of its own
- `processes`: runs these processes, within limits of time and memory
- `turns`: lets clients take turns, and bounds the decoded pixels in memory
- `door`: combines them
"""
