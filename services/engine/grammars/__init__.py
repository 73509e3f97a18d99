"""Limit the cost of the grammars of structured output, so that no client's grammar delays another client.

Before the engine sees a grammar, it is tried in a process that can be killed.

- `house`: queues trials so that clients take turns, and remembers verdicts; in the worker's event loop
- `helper`: the worker's helper process, which forks a process for each trial
- `trial`: vLLM's own checks, the compilation, and a walk through the grammar
- `walk`, `productive`: check whether any answer satisfies a grammar, and what its steps cost
- `engine`: compiles grammars that passed, in the worker's process
- `metered`: ends a request whose grammar makes the engine's steps too expensive
- `messages`: the messages between the processes
"""
