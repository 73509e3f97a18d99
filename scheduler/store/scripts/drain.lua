-- Place nothing more on a worker.
-- ARGV: 1 worker id
-- Reply: 1 if it is known

if not alive(ARGV[1]) then return 0 end
redis.call('SADD', DRAINING, ARGV[1])
touch()
return 1
