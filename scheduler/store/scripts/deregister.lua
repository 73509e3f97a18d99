-- Forget a worker. What is booked on it stays until its requests are over.
-- ARGV: 1 worker id, 2 epoch
-- Reply: 0 when the epoch is older than the worker's last one: nothing is changed; else 1

local worker, epoch = ARGV[1], number(ARGV[2])
if epoch < worker_epoch(worker) then return 0 end
if redis.call('HEXISTS', WORKER_EPOCHS, worker) == 1 then hear_worker(worker, epoch) end
forget_worker(worker)
touch()
return 1
