"""The handoff of KV from a prefill worker to a decode worker.

The worker's host and the handoff run in one engine with vLLM between them. The host puts its orders into the
request (`Request.kv_transfer_params`) and collects the results after each step
(`SchedulerSide.take_reports`). A save on the prefill worker:

1. services/engine/requests.py `prepare` puts `params.save_params` into the request.
2. vllm/scheduler_side.py `SchedulerSide.add` takes the `params.SaveWish`.
3. `SchedulerSide.loadable_tokens` keeps the request waiting until staging has room for its KV.
4. `SchedulerSide.build_step` makes a `SaveJob` for each step that completes KV blocks.
5. vllm/worker_side.py `WorkerSide.save` gets it on each rank, after that step's forward pass.
6. save/saver.py `Saver.save` copies the blocks to staging and asks the transports for offers: a `ShardSave`.
7. `SchedulerSide.update` collects the ShardSaves of all ranks and seals a manifest: a `Begun` after the first
of several steps, a `Saved` after the last.
8. `SchedulerSide.take_reports` hands them to services/engine/host.py, and so to
services/worker/dispatcher.py. Its `Outgoing` sends the manifest to the worker that follows; the router gets
only the message `Saved` (protos/worker.proto), which has none.

A load on the decode worker, which is ordered before its manifest arrives:

1. services/engine/requests.py `prepare` puts `params.load_params`, with the number of tokens, into the
request.
2. `SchedulerSide.add` hands the `params.LoadWish` to vllm/loads.py `Loads`.
3. `SchedulerSide.loadable_tokens` claims the tokens, `allocated` makes a `LoadJob` with the blocks that vLLM
found.
4. `WorkerSide.begin_step` gets it on each rank, before the step's forward pass.
5. load/loader.py `Loader.reserve` stores the reservation.
6. The manifest arrives, before or after the prompt is complete. `BatonConnector.begin_now` hands it to the
loader at once, on the receiving thread; ranks in separate processes get it with the next step. The loader's
threads (load/pull.py) check it, choose a transport, pull, compare digests, write the cache and release the
save.
7. `BatonConnector.complete_load` says that the request has its first token. Once all KV has arrived, too, the
load ends with a `ShardLoad`.
8. `BatonConnector.promote`, called before each step, lets the request run in that step. Failed loads, and all
loads of ranks in separate processes, reach vLLM a step later through `WorkerSide.transfer_results`.
9. `Loads.update` merges the ShardLoads of all ranks into a `Loaded`, which `SchedulerSide.take_reports`
hands to services/engine/host.py.

Embeddings of images, from encode workers, are pulled before their request is in the engine:

1. In an encode worker, vllm/ec_connector.py puts an image's embeddings on the shelf (save/shelf.py), after
the step that computed them. services/worker/encodes.py sends the manifest to the worker that follows.
2. That worker pulls them with load/embeddings.py and attaches them to the request.
3. `BatonECConnector.ensure_cache_available` offers them to vLLM's scheduler, and `start_load_caches` gives
them to each rank in the step that needs them.

save/staging.py holds saved KV under a lease and save/service.py serves it; docs/reliability.md says what ends
the lease if no release arrives. Imports go one way: vllm -> save, load -> transports -> memory -> the modules
next to this file. Only vllm/ imports vLLM.
"""
