"""Which operator ran in which dtype, and what each precision costs on this machine."""
