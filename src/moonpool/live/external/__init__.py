"""vLLM servers as instances: an adapter for each speaks to Conductor and gateway in our workers' messages.

An instance is a server that runs already and that nobody here starts or stops. Its prefix cache is a node of its own
at the Conductor, `<instance>.cache`, private: nothing is fetched from it, but what it holds counts as a hit.
"""
