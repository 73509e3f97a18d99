"""The handoff of KV from a prefill worker to a decode worker.

The worker's host and the handoff share an engine but never call each other directly: vLLM lies between. The
host's orders go in with the request, as `Request.kv_transfer_params`; the results come out after a step,
through `BatonConnector.take_reports`. A save passes these stations on the prefill worker:

1. services/engine/requests.py `prepare` puts `params.save_params` into the request.
2. vllm/scheduler_side.py `SchedulerSide.add` parses it into a `params.SaveWish`.
3. `SchedulerSide.loadable_tokens` keeps the request waiting until staging has room for its KV.
4. `SchedulerSide.build_step` makes a `SaveJob` for each step that leaves final KV: the last one, and for a
longer prompt those before it.
5. vllm/worker_side.py `WorkerSide.save` gets it on each rank, after that step's forward pass.
6. save/saver.py `Saver.save` copies the blocks to staging and asks the transports for offers: a `ShardSave`.
7. `SchedulerSide.update` collects the ShardSaves of all ranks and seals a manifest: a `Begun` after the first
of several steps, a `Saved` after the last.
8. vllm/connector.py `BatonConnector.take_reports` hands them to services/engine/host.py, and so to the
router.

A load passes these on the decode worker, where it is ordered before its manifest arrives:

1. services/engine/requests.py `prepare` puts `params.load_params`, with the number of tokens, into the
request.
2. `SchedulerSide.add` parses it into a `params.LoadWish`; vllm/loads.py `Loads` keeps it.
3. `SchedulerSide.loadable_tokens` claims the tokens, `allocated` makes a `LoadJob` with the blocks that vLLM
found.
4. `WorkerSide.begin_step` gets it on each rank, before the step's forward pass.
5. load/loader.py `Loader.reserve` keeps it.
6. The manifest arrives, for a prompt still being computed or a complete one. `BatonConnector.begin_now` hands
it to the loader on the thread on which it came, beside whatever step runs; ranks in separate processes get it
with the next step. The loader's threads (load/pull.py) check it, choose a transport, pull, compare digests,
write the cache and release the save.
7. `BatonConnector.complete_load` says that the request has its first token. With that and all its KV the load
has ended: a `ShardLoad`.
8. `BatonConnector.promote`, called before each step, lets the request run in that very step. vLLM hears of
failed loads, and of those of ranks in separate processes, by `WorkerSide.transfer_results`, a step later.
9. `Loads.update` collects the ShardLoads of all ranks: a `Loaded`, which `BatonConnector.take_reports` hands
to services/engine/host.py.

Meanwhile the saved KV lies in save/staging.py under a lease, and save/service.py serves it;
docs/reliability.md says what ends the lease if no release arrives. Imports go one way: vllm -> save, load ->
transports -> memory -> the modules beside this file. Only vllm/ imports vLLM.
"""
