"""The only modules that use private parts of Accelerate, torch and safetensors, each with its reason and a check."""
