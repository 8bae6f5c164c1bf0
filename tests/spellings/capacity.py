CAPACITY = {}
def problem(s):
    return None
