"""Offline use: many prompts from Python or from a file, answered by a deployment that ends with its user.

pipeline.py     `from baton import pipeline`: prompts in, responses out
    prompts.py      what a prompt and its options may be, and the request that they make
    responses.py    what comes back
batch.py        `baton batch`: a file of requests in, a file of answers out
    batch_file.py   OpenAI's batch format, checked before anything starts; where to resume
both use
    deployment.py   a deployment of one's own: started, watched, never left behind
    supervised.py   its other end: the process that runs `baton up`'s supervisor
    client.py       HTTP to a router: bounded, patient where waiting helps
    progress.py     how far it is, on stderr
"""
