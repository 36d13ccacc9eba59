"""Changes that kinds of input share: to plain data, to bytes and to text."""

import copy

NUMBERS = (
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 63, 64, 127, 128, 255, 256, 257, 1000),
    *(2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64),
    *(-2, -8, -(2**31), -(2**63), 10**30, 10**400, 0.5, 1e308, -0.0, 1.0, 4.0),
)
TEXTS = ("", "a", "0", "x" * 300, "\0", "\ud800", "é", "'", '"', "\n", "dense", "float32", "0" * 64)
OTHERS = (None, True, False, [], {}, [[]], [{}], {"": None}, [2**63 - 1] * 2000, [1] * 9, [0] * 8)


def value(rng):
    """Returns plain data that is rarely what is expected."""
    return copy.deepcopy(rng.choice((rng.choice(NUMBERS), rng.choice(TEXTS), rng.choice(OTHERS))))


def places(data, above=()):
    """Returns the paths of all values in plain data."""
    found = [above] if above else []
    if isinstance(data, dict):
        for key, inner in data.items():
            found += places(inner, (*above, key))
    elif isinstance(data, list):
        for index, inner in enumerate(data):
            found += places(inner, (*above, index))
    return found


def look_up(data, path):
    for key in path:
        data = data[key]
    return data


def change_data(rng, data):
    """Changes one value somewhere in plain data, in place."""
    paths = places(data)
    if not paths:
        return
    path = rng.choice(paths)
    holder, key = look_up(data, path[:-1]), path[-1]
    way = rng.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1:
        holder[key] = copy.deepcopy(look_up(data, rng.choice(paths)))
    elif way == 2 and isinstance(holder, dict):
        holder[rng.choice((*TEXTS, *holder))] = holder.pop(key)
    elif way == 3 and type(holder[key]) is int:
        holder[key] += rng.choice((-1, 1, 7, 8, holder[key]))
    elif way == 4 and isinstance(holder[key], list):
        holder[key].insert(rng.randint(0, len(holder[key])), value(rng))
    else:
        holder[key] = value(rng)


def change_bytes(rng, content):
    """Returns bytes with a few of them changed, removed or added."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(content) + 1)
        way = rng.randrange(6)
        if way == 0:
            content[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
        elif way == 1:
            del content[at : at + rng.choice((1, 2, 4, 8, 64, len(content)))]
        elif way == 2 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif way == 3:
            size = rng.choice((1, 2, 4, 8))
            number = int(rng.choice(NUMBERS[:-10])) % (1 << 8 * size)
            content[at : at + size] = number.to_bytes(size, "little")
        elif way == 4:
            size = rng.choice((1, 8, 64))
            content[at : at + size] = rng.choice((b"\0", b"\xff")) * len(content[at : at + size])
        elif at < len(content):
            content[at] = rng.randrange(256)
    return bytes(content)


def change_text(rng, text, words):
    """Returns text with something removed, repeated or put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.choice((0, 0, 1, 2, 5)))
        put = rng.choice((rng.choice(words), rng.choice(words), text[at:to] * 2, "", _letter(rng)))
        text = text[:at] + put + text[to:]
    return text


def _letter(rng):
    return chr(rng.choice((rng.randrange(32, 127), rng.randrange(32), rng.randrange(0xD800))))
