-- Make a scheduler the decider, or extend its lease. A new decider's fence is above all earlier ones, even if the server
-- has lost its data, because it is at least the clock.
-- ARGV: 1 who, 2 lease in ms
-- Reply: the fence; 0 while another scheduler decides

local who = redis.call('HGET', DECIDER, 'who')
local fence = number(redis.call('HGET', DECIDER, 'fence'))
local alive = number(redis.call('HGET', DECIDER, 'until')) > NOW
if alive and who ~= ARGV[1] then return '0' end
if not alive then fence = math.max(fence + 1, NOW) end
local text = string.format('%d', fence)
redis.call('HSET', DECIDER, 'who', ARGV[1], 'fence', text, 'until', NOW + number(ARGV[2]))
touch()
return text
