"""A small parallel corpus from the Universal Declaration of Human Rights (public domain)."""

GERMAN = """\
Alle Menschen sind frei und gleich an Würde und Rechten geboren .
Sie sind mit Vernunft und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen .
Jeder hat das Recht auf Leben , Freiheit und Sicherheit der Person .
Niemand darf in Sklaverei oder Leibeigenschaft gehalten werden .
Niemand darf der Folter unterworfen werden .
Jeder hat das Recht , überall als rechtsfähig anerkannt zu werden .
Alle Menschen sind vor dem Gesetz gleich .
Niemand darf willkürlich festgenommen , in Haft gehalten oder des Landes verwiesen werden .
Jeder hat das Recht , sich innerhalb eines Staates frei zu bewegen .
Jeder hat das Recht , jedes Land , einschließlich seines eigenen , zu verlassen .
Jeder hat das Recht , in anderen Ländern vor Verfolgung Asyl zu suchen .
Jeder hat das Recht auf eine Staatsangehörigkeit .
Jeder hat das Recht , allein oder in Gemeinschaft mit anderen Eigentum innezuhaben .
Niemand darf willkürlich seines Eigentums beraubt werden .
Jeder hat das Recht auf Gedanken- , Gewissens- und Religionsfreiheit .
Jeder hat das Recht auf Meinungsfreiheit .
Niemand darf gezwungen werden , einer Vereinigung anzugehören .
Jeder hat das Recht auf Arbeit .
Jeder hat das Recht auf gleichen Lohn für gleiche Arbeit .
Jeder hat das Recht auf Erholung und Freizeit .
Jeder hat das Recht auf Bildung .
Die Bildung ist unentgeltlich .
Der Grundschulunterricht ist obligatorisch .
Jeder hat Pflichten gegenüber der Gemeinschaft .
"""

ENGLISH = """\
All human beings are born free and equal in dignity and rights .
They are endowed with reason and conscience and should act in a spirit of brotherhood .
Everyone has the right to life , liberty and security of person .
No one shall be held in slavery or servitude .
No one shall be subjected to torture .
Everyone has the right to recognition everywhere as a person before the law .
All are equal before the law .
No one shall be subjected to arbitrary arrest , detention or exile .
Everyone has the right to freedom of movement within each state .
Everyone has the right to leave any country , including his own .
Everyone has the right to seek in other countries asylum from persecution .
Everyone has the right to a nationality .
Everyone has the right to own property alone as well as in association with others .
No one shall be arbitrarily deprived of his property .
Everyone has the right to freedom of thought , conscience and religion .
Everyone has the right to freedom of opinion .
No one may be compelled to belong to an association .
Everyone has the right to work .
Everyone has the right to equal pay for equal work .
Everyone has the right to rest and leisure .
Everyone has the right to education .
Education shall be free .
Elementary education shall be compulsory .
Everyone has duties to the community .
"""
