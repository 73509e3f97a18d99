-- All that another store would have to know. Changes nothing.
-- ARGV: none
-- Reply: {now ms, generation or empty, identities, states, loads, worker epochs, worker leases, draining, attempts,
--         attempt leases, epochs}; hashes and leases flat

return {
  NOW, redis.call('GET', GENERATION) or '',
  redis.call('HGETALL', IDENTITIES), redis.call('HGETALL', STATES), redis.call('HGETALL', LOADS),
  redis.call('HGETALL', WORKER_EPOCHS),
  redis.call('ZRANGEBYSCORE', WORKER_LEASES, '(' .. NOW, '+inf', 'WITHSCORES'),
  redis.call('SMEMBERS', DRAINING),
  redis.call('HGETALL', ATTEMPTS), redis.call('ZRANGE', ATTEMPT_LEASES, 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', EPOCHS),
}
