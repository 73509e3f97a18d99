-- Replace all orders, if the caller is still the decider.
-- ARGV: 1 its fence, then fleet:ID and its orders of each fleet
-- Reply: 0 if it is not, else 1

if redis.call('HGET', DECIDER, 'fence') ~= ARGV[1] or number(redis.call('HGET', DECIDER, 'until')) <= NOW then return 0 end
redis.call('DEL', ORDERS)
for place = 2, #ARGV, 2 do redis.call('HSET', ORDERS, ARGV[place], ARGV[place + 1]) end
touch()
return 1
