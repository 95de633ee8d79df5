"""What tests of drawings read from a figure of matplotlib."""


def legend(figure):
    return {text.get_text() for actual in figure.legends for text in actual.get_texts()}


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def draw_everything(figure):
    # Layout and fonts may fail only here.
    figure.draw_without_rendering()
    return figure
