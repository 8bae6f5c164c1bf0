LOOPS = {}
