"""Recipe: GSM8K with a calculator tool."""
