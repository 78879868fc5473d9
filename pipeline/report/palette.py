"""How curves are told apart: one colour and dash for each place in a legend, the same in every plot, picture and page."""

# Colours that can be told apart by the colour-blind (Okabe and Ito 2008) and on white as on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("solid", "dashed", "dotted")  # as Bokeh, matplotlib and CSS call them
LOOKS = len(COLOURS) * len(DASHES)  # of more curves two would look the same


def look(place: int) -> tuple[str, str]:
    """(colour, dash): the first curves are solid, which reads best, and differ by colour alone."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
