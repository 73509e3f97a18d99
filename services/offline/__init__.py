"""Offline use: many prompts, from Python or from a file, run by a deployment that ends with its user.

pipeline.py     `from baton import pipeline`: prompts in, responses out
    prompts.py      prompts, options, and the HTTP requests made from them
    responses.py    responses, made from HTTP bodies
batch.py        `baton batch`: a file of requests in, a file of results out
    batch_file.py   OpenAI's batch format, checked before anything starts; where to resume
both use
    deployment.py   a private deployment: started, watched, never left behind
    supervised.py   its other end: the process that runs the supervisor of `baton up`
    client.py       HTTP to a router: bounded concurrency, retries
    progress.py     the progress display on stderr
"""
