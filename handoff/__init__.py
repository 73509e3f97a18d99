"""How KV gets from a prefill worker to a decode worker.

The worker's host and the handoff run in the same engine but never call each other directly: vLLM lies between. What
the host wants goes in with the request, as `Request.kv_transfer_params`; what became of it comes out after a step, by
`BatonConnector.take_reports`. On the way there are these stations:

Save, on the prefill worker
  1. services/engine/requests.py: prepare           puts params.save_params into the request
  2. vllm/scheduler_side.py: SchedulerSide.add      parses it into a params.SaveWish
  3. SchedulerSide.loadable_tokens                  keeps the request waiting until staging has room for its KV
  4. SchedulerSide.build_step                       makes a SaveJob for the step that ends the prompt
  5. vllm/worker_side.py: WorkerSide.save           each rank, after that step's forward pass
  6. save/saver.py: Saver.save                      copies blocks to staging, asks transports for offers: a ShardSave
  7. SchedulerSide.update                           collects all ranks' ShardSaves and seals a manifest: a Saved
  8. vllm/connector.py: BatonConnector.take_reports hands the Saved to services/engine/host.py, thence to the router

Load, on the decode worker
  1. services/engine/requests.py: prepare           puts params.load_params, with the manifest, into the request
  2. SchedulerSide.add                              parses it into a params.LoadWish
  3. SchedulerSide.loadable_tokens, .allocated      claim the tokens, then make a LoadJob with the blocks found
  4. WorkerSide.begin_step                          each rank, before the step's forward pass
  5. load/loader.py: Loader.submit                  pulls on threads of its own: checks the manifest, chooses a
                                                    transport, pulls, compares digests, writes the cache: a ShardLoad
  6. WorkerSide.transfer_results                    tells vLLM that the request can run
  7. SchedulerSide.update                           collects all ranks' ShardLoads: a Loaded
  8. BatonConnector.take_reports                    hands the Loaded to services/engine/host.py

Meanwhile the saved KV lies in save/staging.py under a lease, and save/service.py serves it. The loader releases it in
the end through channels.py; docs/leases.md tells what happens if it does not.

Imports go one way: vllm -> save, load -> transports -> memory -> the modules beside this file. vLLM is imported in
vllm/ alone.
"""
