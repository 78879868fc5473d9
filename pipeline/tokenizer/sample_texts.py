"""Short texts of kinds that a training corpus may hold little of. Written for this file."""

SAMPLES = {
    "prose": (
        "The harbour was still asleep when Marta walked down to the boats. A thin mist hung over the water, and the only "
        "sound was a rope knocking against a mast. She had promised her brother that she would check the engine before "
        "the others came, and she meant to keep that promise even though her hands were stiff with cold. By the time the "
        'sun touched the roofs, the engine was running. "You could have waited," he said. "I could have," she answered, '
        '"but then we would have lost the tide." Nobody spoke of it again; there was too much work to do.'
    ),
    "code": '''\
import heapq


class Router:
    """Shortest paths on a weighted graph."""

    def __init__(self, edges: list[tuple[str, str, float]]):
        self.neighbours = {}
        for left, right, cost in edges:
            self.neighbours.setdefault(left, []).append((right, cost))
            self.neighbours.setdefault(right, []).append((left, cost))

    def distance(self, start: str, goal: str) -> float | None:
        queue, seen = [(0.0, start)], set()
        while queue:
            cost, node = heapq.heappop(queue)
            if node == goal:
                return cost
            if node not in seen:
                seen.add(node)
                for other, step in self.neighbours.get(node, ()):
                    heapq.heappush(queue, (cost + step, other))
        return None


if __name__ == "__main__":
    print(Router([("a", "b", 1.5), ("b", "c", 2.0)]).distance("a", "c"))  # 3.5
''',
    "numbers": (
        "3.14159265 2.71828183 1,024 65,536 4,294,967,296 19:45:07 2024-02-29 1e-8 6.022e23 -40 +7 100% $1,299.99\n"
        "12 + 345 = 357; 6789 - 1011 = 5778; 24 * 365 = 8760; 1000000 / 128 = 7812.5; 17^2 = 289; 2^31 - 1 = 2147483647\n"
        "Order 20240817-0042: 3 x 14.50 + 2 x 7.25 = 58.00; account 0049 221 5550 1734; version 5.23.0; page 1187\n"
    ),
    "non-English": (
        "Der Zug nach Norden f\u00e4hrt heute sp\u00e4ter, weil auf der Br\u00fccke gearbeitet wird; wer es eilig hat, nimmt den Bus.\n"
        "Ma grand-m\u00e8re pr\u00e9parait le d\u00eener pendant que nous \u00e9tions d\u00e9j\u00e0 \u00e0 table, et personne n'osait l'interrompre.\n"
        "El a\u00f1o pasado sembramos tomates, pero la lluvia lleg\u00f3 demasiado pronto y se perdi\u00f3 casi toda la cosecha.\n"
        "\u0417\u0430\u0432\u0442\u0440\u0430 \u0443\u0442\u0440\u043e\u043c \u043c\u044b \u043f\u043e\u0439\u0434\u0451\u043c \u043a \u0440\u0435\u043a\u0435, \u0435\u0441\u043b\u0438 \u043d\u0435 \u0431\u0443\u0434\u0435\u0442 \u0434\u043e\u0436\u0434\u044f.\n"
        "\u4eca\u5929\u7684\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u8d70\u8d70\u5427\u3002 \u660e\u65e5\u306f\u96e8\u304c\u964d\u308b\u304b\u3082\u3057\u308c\u307e\u305b\u3093\u3002 "
        "\uc624\ub298\uc740 \uc2dc\uac04\uc774 \uc5c6\uc5b4\uc694.\n"
        "\u0643\u062a\u0628 \u0627\u0644\u0648\u0644\u062f \u0631\u0633\u0627\u0644\u0629 \u0637\u0648\u064a\u0644\u0629 \u0625\u0644\u0649 \u0635\u062f\u064a\u0642\u0647. "
        "\u0928\u092e\u0938\u094d\u0924\u0947, \u0906\u092a \u0915\u0948\u0938\u0947 \u0939\u0948\u0902?\n"
    ),
}
