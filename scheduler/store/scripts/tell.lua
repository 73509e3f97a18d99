-- Keep a sender's last message.
-- ARGV: 1 KIND:ID, 2 message, 3 lease in ms
-- Reply: the orders for the sender, or empty

redis.call('HSET', TOLD, ARGV[1], ARGV[2])
redis.call('ZADD', TOLD_LEASES, NOW + number(ARGV[3]), ARGV[1])
touch()
return redis.call('HGET', ORDERS, ARGV[1]) or ''
