"""Bound the cost of grammars of answers: no client's grammar holds up another client's request.

Before the engine sees a grammar, it is tried in a process that can be ended.

- `house`: lets clients take turns and remembers verdicts, for the worker's loop
- `helper`: the process beside the worker, which forks a process for each trial
- `trial`: one trial: vLLM's own checks, the compilation, and a walk through the grammar
- `walk`, `productive`: whether any answer satisfies a grammar, and what its steps cost
- `engine`: compiles a grammar that passed, in the worker's process
- `metered`: ends a request whose grammar makes the engine's steps too expensive
- `messages`: the messages between the processes
"""
