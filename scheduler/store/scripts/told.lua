-- Return the messages whose leases have not expired, and the orders.
-- ARGV: none
-- Reply: {messages, orders}, as KIND:ID, message, ... and fleet:ID, orders, ...

for _, who in ipairs(redis.call('ZRANGEBYSCORE', TOLD_LEASES, '-inf', NOW)) do
  redis.call('HDEL', TOLD, who)
  redis.call('ZREM', TOLD_LEASES, who)
end
return {redis.call('HGETALL', TOLD), redis.call('HGETALL', ORDERS)}
