"""An endpoint for a trained model, with OpenAI's protocol."""
