"""vLLM's OpenAI front end over the router. No other part of the router imports vLLM."""

# These imports take seconds; vLLM imports some of them only when its app is built.
HEAVY_IMPORTS = (
    "baton.services.router.vllm.frontend",
    "model_hosting_container_standards.sagemaker",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
)
