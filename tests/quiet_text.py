"""A text that no model has read, for perplexities."""

# Written for the tests.
TEXT = """\
The lighthouse keeper wrote down the weather every evening, because his father had done so before him. On most days
there was little to say: the wind came from the west, the sea was grey, and two or three ships passed far away on their
road to the harbour. In winter the lamp burned for sixteen hours, and he had to carry oil up the stairs twice in a
night. When the first snow fell, the road to the village was closed, and he lived on bread, potatoes and dried fish
until somebody came with a sledge. One morning in February he found a boat on the rocks below the tower. Nobody was in
it, but there was a wooden box with a broken lock, and in the box were letters, tied together with a blue ribbon. He
took them into the kitchen, dried them near the stove, and began to read. The first letter was from a woman who asked
her brother to come home. She said that their mother was ill, that the apple trees had been cut down, and that the
house would be sold in the spring if he did not return. The second letter was shorter. It said only that it was too
late now, and that he should keep the money. The keeper looked out of the window for a long time. Then he put the
letters back into the box, wrote the date and the place on a piece of paper, and waited for the road to open again.
"""
