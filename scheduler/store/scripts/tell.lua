-- Keep the last message of a router, a fleet, a process, or of a scheduler about turns.
-- ARGV: 1 KIND:ID, 2 message, 3 for so many ms
-- Reply: the orders for it, or empty

redis.call('HSET', TOLD, ARGV[1], ARGV[2])
redis.call('ZADD', TOLD_LEASES, NOW + number(ARGV[3]), ARGV[1])
touch()
return redis.call('HGET', ORDERS, ARGV[1]) or ''
