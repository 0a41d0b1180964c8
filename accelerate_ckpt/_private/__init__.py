"""The only files that touch private parts of Accelerate, torch and safetensors, each with its reason and a guard."""
