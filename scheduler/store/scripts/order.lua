-- Replace all orders if the caller is still the decider.
-- ARGV: 1 its fence; then fleet:ID, orders, ...
-- Reply: 1 if it is, else 0

if redis.call('HGET', DECIDER, 'fence') ~= ARGV[1] or number(redis.call('HGET', DECIDER, 'until')) <= NOW then return 0 end
redis.call('DEL', ORDERS)
for place = 2, #ARGV, 2 do redis.call('HSET', ORDERS, ARGV[place], ARGV[place + 1]) end
touch()
return 1
