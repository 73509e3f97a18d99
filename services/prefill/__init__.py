"""Order prompts, and divide engine steps among them."""
