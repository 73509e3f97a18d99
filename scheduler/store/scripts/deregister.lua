-- Forget a worker. What is booked on it stays until its requests are over.
-- ARGV: 1 worker id
-- Reply: 1

forget_worker(ARGV[1])
return 1
