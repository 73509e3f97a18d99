"""Grammars of answers, bounded in what they cost: no client's grammar holds up another's request.

A grammar is tried in a process that can be ended before the engine sees it.

- `house`: the worker's loop asks it; it takes turns between clients, and remembers verdicts
- `helper`: the process beside the worker; forks one process for each trial
- `trial`: one trial: vLLM's own checks, the compilation, and a walk through the grammar
- `walk`, `productive`: whether any answer satisfies a grammar, and what a step of it costs
- `engine`: compiles a grammar that passed, in the worker's process
- `metered`: ends a request whose grammar costs its engine's steps too much
- `messages`: what passes between the processes
"""
